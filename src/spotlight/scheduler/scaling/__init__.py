"""How many spot nodes a deadline or a budget needs, from what the run measured. Pure; used by drivers."""
