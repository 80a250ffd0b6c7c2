"""The `dpiframe` command: arguments in, results and one-line errors out. What does the work is imported when it is needed."""
