"""The SQLite ledger: schema, writes, queries and the offline audit."""
