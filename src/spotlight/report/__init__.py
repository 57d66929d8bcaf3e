"""Reports of a finished run: model card, tables, galleries."""
