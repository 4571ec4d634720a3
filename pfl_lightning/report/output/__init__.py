"""What a report writes: tables, curves and the page that holds them.

=======================================  ==========================================================================
``tables``, ``columns``, ``notes``       tables as texts, their columns, and the sentences below them
``curves``                               learning curves and the clients' accuracies
``formats``, ``csv_files``, ``page``     Markdown, LaTeX, HTML, terminal; CSV; the HTML page
``writing``                              all of it as files, and the table on a terminal
=======================================  ==========================================================================
"""
