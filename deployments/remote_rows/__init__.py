"""Rows of tables from other hosts: processes that have files and no GPU answer what a replica reads ahead."""
