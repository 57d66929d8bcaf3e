"""Every reward in processes of its own, with deadlines."""
