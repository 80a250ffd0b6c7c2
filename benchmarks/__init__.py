"""What the product is measured with: suites, peers, records and reports. Reads all of the product; nothing reads it."""
