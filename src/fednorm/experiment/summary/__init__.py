"""Results of several seeds as tables: spread, significance, output formats."""
