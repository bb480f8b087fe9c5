-- Months since the year 0 from days since the epoch, and back. The Python twin is windows.month_of in
-- gateway/limits. Years start in March here.
local function month_of(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local rest = shifted - era * 146097
  local year = math.floor((rest - math.floor(rest / 1460) + math.floor(rest / 36524) - math.floor(rest / 146096)) / 365)
  rest = rest - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  return (year + era * 400) * 12 + math.floor((5 * rest + 2) / 153) + 2
end

local function first_day_of(month)
  local year, since_march = math.floor((month - 2) / 12), (month - 2) % 12
  local era = math.floor(year / 400)
  local of_era = year - era * 400
  local days = era * 146097 + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100)
  return days + math.floor((153 * since_march + 2) / 5) - 719468
end
