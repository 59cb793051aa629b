"""The element-wise work of RWKV-7's time-mix block around its recurrence."""
