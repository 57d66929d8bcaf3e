"""The controller: everything that decides, without torch, clock or network. Begin at `controller.py`."""
