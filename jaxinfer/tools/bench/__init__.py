"""How fast the engine is on a load, and how far that is from what the device allows.

workload   which requests, of what lengths, when
run        offers them to an LLM; what it took, as data
compare    the same load without a KV cache, and with contiguous reservation
report     all of that for people
"""
