"""What an engine is: the options of a user, the facts of a device, and all that is decided from them."""
