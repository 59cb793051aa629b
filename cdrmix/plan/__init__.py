"""What a configuration amounts to before it runs: parameters, floating-point operations, memory, time and disk."""
