"""Reports: a comparison or a story as a table, as curves, and as one page that holds both."""
