"""A module that says something when it is imported, as some warnings are."""

print("said by an import")
