"""Models of other libraries -> bundles: importers read files or a live module into a `SourceModel`, `write_import` writes it.

Nothing here is executed or unpickled, and no library is imported: what a checkpoint does not say comes from the user's files.
"""
