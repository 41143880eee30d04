"""What an evaluation leaves behind: result rows, their figures with intervals, comparisons, tables and cards."""
