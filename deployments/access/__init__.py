"""Who may ask for what, and what a configuration may reach: tokens, the check of a request, the bundles' folder.

Knows no HTTP and no Ray.
"""
