"""Commands that need no run: simulate, plan, prices, traces, notices."""
