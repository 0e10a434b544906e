"""While a server runs: is what lies in memory what was put there, and does another core compute the same bits?"""
