"""``spotlight train --fit``: which settings make a run fit one GPU. Imports no torch."""
