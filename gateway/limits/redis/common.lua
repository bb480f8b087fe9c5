-- The beginning of all scripts: reads and writes what a holder of limits has used. The Python twins are
-- gateway/limits/decision.py and gateway/limits/windows.py; the comments name the functions.
-- A holder is a hash with these fields: when its buckets of requests (r) and tokens (t) are full again, the seconds that were
-- returned to each (rb, tb), the current day (d) with its tokens and cost (dt, dn), another day (od, odt, odn), and the
-- same of the weeks (w, …) and the months (m, …). A session has a separate hash, where its use is that of period 1 (s, st, sn). A rolling window of 7d has a field for each slice of its ring (7d:0, 7d:1, …) with
-- the slice's number, tokens and cost. A cost is in nano-units. Gateways of other versions read these fields: never change what one means.
-- The fields e and e … are of restore.lua.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local BUCKETS, SLICES = {'r', 't', 'rb', 'tb'}, 24
local PREFIXES = {day = 'd', week = 'w', month = 'm', session = 's'}
local LIFETIMES = {day = 3 * 86400, week = 21 * 86400, month = 70 * 86400, session = 86400}

-- Return the number of the period, or of the slice, to which a time belongs: windows.period_of.
local function period_of(window, time)
  if window.slice > 0 then return math.floor(time / window.slice) end
  if window.name == 'session' then return 1 end
  local day = math.floor(time / 86400)
  if window.name == 'month' then return month_of(day) end
  return window.name == 'day' and day or math.floor((day + 3) / 7)
end

local function read_period(values, i)
  return {number = tonumber(values[i] or 0), tokens = tonumber(values[i + 1] or 0), cost = tonumber(values[i + 2] or 0)}
end

local function calendar_fields(p) return {p, p .. 't', p .. 'n', 'o' .. p, 'o' .. p .. 't', 'o' .. p .. 'n'} end

-- Read the counts of a window: the current and the other period of the calendar, or the slices of the ring.
local function read_window(key, window)
  if window.slice == 0 then
    local values = redis.call('HMGET', key, unpack(calendar_fields(PREFIXES[window.name])))
    window.current, window.other = read_period(values, 1), read_period(values, 4)
    return
  end
  local names = {}
  for slot = 0, SLICES do names[slot + 1] = window.name .. ':' .. slot end
  window.slots = {}
  for i, text in ipairs(redis.call('HMGET', key, unpack(names))) do
    local number, tokens, cost = string.match(text or '', '(%S+) (%S+) (%S+)')
    if number then window.slots[i - 1] = {number = tonumber(number), tokens = tonumber(tokens), cost = tonumber(cost)} end
  end
end

local function read_holder(key, windows)
  local holder = {windows = windows}
  for i, value in ipairs(redis.call('HMGET', key, unpack(BUCKETS))) do holder[BUCKETS[i]] = tonumber(value or 0) end
  for _, window in ipairs(windows) do read_window(key, window) end
  return holder
end

local function text_of(number) return string.format('%.17g', number) end

-- Return the words of a text. Numbers come in few arguments and leave in one text, because each argument costs the gateway time.
local function words_of(text)
  local words = {}
  for word in string.gmatch(text, '%S+') do words[#words + 1] = word end
  return words
end

-- Return the windows that a text names: for each the name and the seconds of a slice.
local function windows_of(text)
  local names, windows = words_of(text), {}
  for w = 1, #names / 2 do windows[w] = {name = names[2 * w - 1], slice = tonumber(names[2 * w])} end
  return windows
end

local function reply_of(values)
  for i, value in ipairs(values) do
    if type(value) == 'number' then values[i] = string.format('%.0f', value) end
  end
  return table.concat(values, ' ')
end

local function append(values, ...)
  for _, value in ipairs({...}) do values[#values + 1] = value end
end

local function write_holder(key, holder)
  local values, lifetime = {}, math.ceil(math.max(holder.r - now, holder.t - now, 0)) + 120
  for _, name in ipairs(BUCKETS) do append(values, name, text_of(holder[name])) end
  for _, window in ipairs(holder.windows) do
    lifetime = math.max(lifetime, LIFETIMES[window.name] or math.ceil(window.slice * (SLICES + 1)) + 86400)
    if window.slice == 0 then
      for prefix, period in pairs({[PREFIXES[window.name]] = window.current, ['o' .. PREFIXES[window.name]] = window.other}) do
        append(values, prefix, text_of(period.number), prefix .. 't', text_of(period.tokens), prefix .. 'n', text_of(period.cost))
      end
    elseif window.changed then
      local slice = window.slots[window.changed]
      append(values, window.name .. ':' .. window.changed, text_of(slice.number) .. ' ' .. text_of(slice.tokens) .. ' ' .. text_of(slice.cost))
    end
  end
  redis.call('HSET', key, unpack(values))
  if redis.call('TTL', key) < lifetime then redis.call('EXPIRE', key, lifetime) end
end

-- Take seconds from a bucket: decision._settle_bucket, and the buckets in decision.admit.
local function take_from_bucket(holder, bucket, seconds)
  if seconds > 0 then holder[bucket] = math.max(holder[bucket], now) + seconds end
end

-- Return a period or slice of a window; nothing if it is not remembered: windows._known_period.
local function known_period(window, number)
  if window.slice == 0 then
    return window.current.number == number and window.current or window.other.number == number and window.other or nil
  end
  local slice = window.slots[number % (SLICES + 1)]
  return slice and slice.number == number and slice or nil
end

-- Add to a period or slice, which is remembered. In a window of the calendar, the later one of the two other known periods is
-- remembered too: windows._start_period. Here the later of both is the current one, also after a clock was set back.
local function add_to_period(window, number, tokens, cost)
  local period = known_period(window, number)
  window.changed = number % (SLICES + 1)
  if not period then
    period = {number = number, tokens = 0, cost = 0}
    if window.slice > 0 then
      window.slots[window.changed] = period
    else
      local later = window.current.number > window.other.number and window.current or window.other
      window.current, window.other = period, later
      if later.number > number then window.current, window.other = later, period end
    end
  end
  period.tokens, period.cost = period.tokens + tokens, period.cost + cost
end

-- Return the periods of a window that count, with the oldest first: windows.used_in. Slices ahead of the clock count too.
local function counted_periods(window)
  local period, found = period_of(window, now), {}
  if window.slice == 0 then return {known_period(window, period)} end
  for slot = 0, SLICES do
    local slice = window.slots[slot]
    if slice and math.abs(slice.number - period) <= SLICES then found[#found + 1] = slice end
  end
  table.sort(found, function(a, b) return a.number < b.number end)
  return found
end

local function used_in(window)
  local tokens, cost = 0, 0
  for _, period in ipairs(counted_periods(window)) do tokens, cost = tokens + period.tokens, cost + period.cost end
  return tokens, cost
end

local function seconds_left(name)
  local day = math.floor(now / 86400)
  if name == 'day' then return (day + 1) * 86400 - now end
  if name == 'week' then return (math.floor((day + 3) / 7) * 7 + 4) * 86400 - now end
  return first_day_of(month_of(day) + 1) * 86400 - now
end

-- Return the seconds until nothing of a window is used: windows.seconds_until_unused.
local function seconds_until_unused(window)
  if window.slice == 0 then return window.name == 'session' and 0 or seconds_left(window.name) end
  local seconds = 0
  for _, slice in ipairs(counted_periods(window)) do
    if slice.tokens > 0 or slice.cost > 0 then seconds = (slice.number + SLICES + 1) * window.slice - now end
  end
  return seconds
end

-- Append the milliseconds until a holder's buckets are full, and for each window its tokens, its cost, and the milliseconds until nothing
-- of it is used.
local function append_counts(reply, holder)
  append(reply, math.ceil(math.max(holder.r - now, 0) * 1000), math.ceil(math.max(holder.t - now, 0) * 1000))
  for _, window in ipairs(holder.windows) do
    local tokens, cost = used_in(window)
    append(reply, tokens, cost, math.ceil(seconds_until_unused(window) * 1000))
  end
end
