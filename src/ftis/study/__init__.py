"""What runs and experiments came to: statistics, budgets, results, rates, and what a terminal shows of them."""
