"""Weight leaves and their forms: quantized, packed, smoothed."""
