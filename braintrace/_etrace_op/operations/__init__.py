"""The ETP operations, one file each: function, declaration, user function."""
