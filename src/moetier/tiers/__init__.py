"""Where each expert is, and what moves it: the DRAM and disk tiers, the cache policy, and heat."""
