"""Tasks with choices in llama-perplexity's file formats: HellaSwag, WinoGrande, multiple choice."""
