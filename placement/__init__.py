"""Where things run: layouts, memory, plans, and the Ray placement groups made from them."""
