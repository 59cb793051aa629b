"""The feed-forward half of a block: mixtures of experts and RWKV's channel-mix."""
