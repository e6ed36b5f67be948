"""What happens, as numbers: the definitions every process counts by, and the hub that serves their sum."""
