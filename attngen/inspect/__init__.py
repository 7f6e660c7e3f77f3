"""Views for users: plans, masks, and calls compared with the reference."""
