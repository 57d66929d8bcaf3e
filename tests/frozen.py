"""Preloaded last by the fork server: no collection in a forked process looks at what was imported before."""

import gc

gc.collect()
gc.freeze()
