"""The same layer under Hugging Face transformers."""
