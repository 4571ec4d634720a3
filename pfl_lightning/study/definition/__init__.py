"""What a study file says, and the runs that it plans.

=======================================  ==========================================================================
``study``                                a study and its parts, as dataclasses
``reader``, ``entry``                    what each key may hold; a value, whose errors name its place in the file
``plan``                                 the rows of the table and their runs, with configs and folders
``options``                              configs merged, read and changed by paths of options, and as YAML files
=======================================  ==========================================================================
"""
