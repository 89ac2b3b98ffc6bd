"""How the groups of a message stand in bytes: a file for each form.

A new form is a file here with a :class:`ftis.codec.Form`, and its line in :data:`ftis.seams.FORMS`.
"""
