"""Reports: a comparison or a published figure as tables, plots and one HTML page."""
