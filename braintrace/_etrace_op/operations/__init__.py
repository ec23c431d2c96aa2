"""The ETP operations, one file each: forward function, declaration, user function."""
