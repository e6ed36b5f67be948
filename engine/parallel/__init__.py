"""One model on several devices: every rank has a share of each layer, and all ranks compute every step."""
