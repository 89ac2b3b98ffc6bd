"""The built-in tasks, one file each, with a function ``load(TaskConfig) -> Task``. A recipe's ``task.name`` names one.

===========================  ===============  ====================================================  ==============
name                         file             problems                                              answers are
===========================  ===============  ====================================================  ==============
``gsm8k``                    ``gsm8k.py``     GSM8K, train and test split                           ``number``
``math500``                  ``math500.py``   MATH-500, for evaluation only                         ``math``
``jsonl``                    ``jsonl.py``     your own, from JSON Lines files                       ``exact``
``clock``                    ``clock.py``     left-to-right arithmetic modulo 10, made on the spot  ``exact``
``word_problems``            ``words.py``     arithmetic word problems, made on the spot            ``number``
``reasoning_gym:<dataset>``  ``gym.py``       a procedural data set of reasoning-gym                ``exact``
===========================  ===============  ====================================================  ==============

``reading.py`` reads rows and their fields from files, ``splitting.py`` draws seeded subsets and holds problems out.
Both serve tasks of your own too. :mod:`ftis.prompts` defines a task.
"""
