"""Programs for maintainers; nothing here is installed."""
