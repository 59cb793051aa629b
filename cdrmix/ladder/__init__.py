"""The model ladder: models of growing size, what each costs, and what loss the next one should have."""
