"""Scoring: text metrics, the structure check, and the published reward formulas, each in one explicit table."""
