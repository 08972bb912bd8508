"""Text in and out: tokens, chat templates, prompts, detokenizing, stop strings."""
