"""What people read after a run: cards, tables, galleries."""
