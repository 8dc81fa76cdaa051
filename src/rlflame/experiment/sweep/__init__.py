"""Several seeds as one job."""
