"""What programs call, a folder for each operation."""
