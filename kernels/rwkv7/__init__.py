"""RWKV-7's recurrence: the generalised delta rule over documents."""
