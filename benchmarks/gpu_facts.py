"""Prints facts about a GPU machine as JSON: those of every row, the device, and the rates measured on it."""

from __future__ import annotations

import json

import machine
import torch

if __name__ == "__main__":
    device = torch.device("cuda")
    properties = torch.cuda.get_device_properties(device)
    found = machine.facts() | {
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "capability": torch.cuda.get_device_capability(device),
        "datasheet": machine.datasheet(device),
        "measured": machine.measured_rates(device),
    }
    print(json.dumps(found, indent=2))
