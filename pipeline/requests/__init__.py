"""What the verbs can be asked for: requests, made of fields that say name, type, default, help and recipe key once."""
