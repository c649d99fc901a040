"""LoRA adapters of a running engine: from a folder that PEFT wrote to a slot on the device (docs/lora.md)."""
