"""What make calls: which stages are out of date, dry runs, machine checks, publishing."""
