"""From logits to a drawn token: filters, penalties, logprobs, a user's own processors."""
