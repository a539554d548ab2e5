"""What the user calls: one file an operator, each a docstring, checks, views and one call."""
