"""Everything that decides: the controller, its queue and ledger, and the nouns that flow."""
