"""How much to explore: arms, what they cost, what they brought, and which comes next."""
